"""Task-specific fields: one file per task that has any, named after the task."""
