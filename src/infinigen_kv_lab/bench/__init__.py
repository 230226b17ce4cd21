"""Speed and fidelity of policies side by side."""
