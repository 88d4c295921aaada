"""Secure sums: vectors, keys and messages; nothing of methods, models or engines is known here."""
