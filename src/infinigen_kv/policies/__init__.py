"""Which entries a decode step moves: one small file per policy, all behind `base.Policy`."""
