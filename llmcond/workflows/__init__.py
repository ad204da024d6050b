"""The verbs: each works on one run folder, with values that commands have checked."""
