"""Where calls run: each mode's backends behind one protocol, and the choice between them."""
