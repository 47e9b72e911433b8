"""This machine and this process: interpreter, signals, compilers, untrusted files, packages."""
