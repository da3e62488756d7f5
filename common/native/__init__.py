"""Code that is compiled, calls libc, or asks the kernel of this host."""
