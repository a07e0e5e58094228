"""Several hosts with slow links on one Linux machine: `python -m bench.netlab`."""
