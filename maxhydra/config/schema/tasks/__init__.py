"""Fields of single tasks: one file per task that has any, named as the task."""
