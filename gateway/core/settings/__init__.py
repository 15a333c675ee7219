"""How settings are read: nodes with lines in, frozen values or a list of every mistake out."""
