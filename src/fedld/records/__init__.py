"""The one schema that everybody shares: what a run writes and everybody reads."""
