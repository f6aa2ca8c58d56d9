"""What a step takes on devices that are not here, from the compiler: memory, collectives."""
