"""Memory, traffic and step time of a training setup on any number of devices, by arithmetic on shapes."""
