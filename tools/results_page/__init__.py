"""What tools/make_results.py needs to write the page of results. Not installed."""
