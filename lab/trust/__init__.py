"""What goes wrong, and what then: kills, bad disks, hostile replies, reward hacking, detectors that err, other loops."""
