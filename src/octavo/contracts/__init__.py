"""What crosses a process or package line. A leaf: no behaviour, no torch, imports nothing of Octavo but its params."""
