"""Where jobs run: this process, worker processes, Flower sites."""
