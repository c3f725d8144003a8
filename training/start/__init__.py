"""How the processes of a run start together, and how a script ends: in one line, once, with nothing left behind."""
