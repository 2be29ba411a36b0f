"""Speed, measured: pytest-benchmark suites, each case a ratio to a peer or to the copy bandwidth of the same run."""
