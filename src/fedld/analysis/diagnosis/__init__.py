"""What ails a federation, in sentences with numbers."""
