"""jtrain: any pure loss function, on any number of devices, with one result."""
