"""Effects: sockets, tasks, clocks, files, metrics."""
