"""Evidence behind the documentation: studies, one tidy file of numbers, pages and figures made from it."""
