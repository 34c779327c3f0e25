"""Sweeps that look for the best: what is tried, jobs that try it, and a controller that may die at any moment.

A job is an ordinary run in a folder of its own, started by an ordinary command; the controller only reads what runs
write. So a sweep can be gone on with after anything: finished jobs are there, running ones are found again, and one
that was lost goes on from its checkpoint.
"""
