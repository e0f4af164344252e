"""Glue for trainers of other projects that need it, a module for each; importing one imports its project.

Most trainers need none: docs/trainers.md has the lines for each.
"""
