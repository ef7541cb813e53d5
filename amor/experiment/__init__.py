"""Studies, run: what of a study is missing is trained and judged, several at a time, and what
stands is kept."""
