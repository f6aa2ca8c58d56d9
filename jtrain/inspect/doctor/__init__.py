"""Doctor: checks of the machine before anything is trained.

Each check is a pure function of facts that another function gathers. What may crash or hang (the
start of JAX's devices, a file server) runs in a child process with a timeout. Nothing here needs
JAX, or any other package, to be importable.
"""
