"""For a reader: what a spec means, how two differ, what was predicted and recorded, in text and on pages."""
