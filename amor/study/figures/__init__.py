"""Figures. Matplotlib is imported here and nowhere else; one file a figure."""
