"""What everything else needs and what knows nothing of attention: errors, files, Markdown, shapes of JSON."""
