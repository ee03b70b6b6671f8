"""The command line: ``python -m shardkit SUBCOMMAND``.

``main`` parses and calls; each subcommand is a module of its own. ``explain`` compiles a function for a
machine and says what it will do there. ``doctor`` looks at what is here: ``versions``
(comparing them), ``packages`` (what is installed), ``known_bad`` (which of it is trouble), ``surroundings`` (the
environment's variables), ``cluster`` (several processes), ``devices`` (asked for in a process of their own), and
``findings`` (what it says). None of these imports JAX, so that they work where JAX doesn't.
"""
