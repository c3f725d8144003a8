"""This project's methods beside those of other packages; its command line is python -m bench.peers."""
