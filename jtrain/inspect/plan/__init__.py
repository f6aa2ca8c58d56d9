"""Plans of a step for absent devices, from the compiler: memory and collectives."""
