"""The experiment: settings, presets, and the values they name."""
