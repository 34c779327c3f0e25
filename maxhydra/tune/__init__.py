"""The search for fast settings: what to try, in which order, each in a process of its own, and what is made of it."""
