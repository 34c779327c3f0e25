"""One module per model family, with a TABLE or several TABLES. To add a family, see docs/models.md."""
