"""How often `locate` names the fault that was planted."""
