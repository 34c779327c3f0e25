"""Sweeps: grids and hyperparameter searches, run by a controller that can be restarted at any time.

A job is an ordinary run in its own folder, started by an ordinary command; the controller only reads what runs write.
So a sweep can be resumed after any failure: finished jobs are recorded, running ones are found again, and interrupted
ones resume from their checkpoints.
"""
