"""Task-specific fields: a class `<Name>Task` for each task that has any, found by its name."""
