"""The documentation as a site: what mkdocs adds to the pages of docs/."""
