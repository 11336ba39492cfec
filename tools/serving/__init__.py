"""What tools/bench_serving.py needs: a workspace, a server, load over HTTP, and the same work without HTTP."""
