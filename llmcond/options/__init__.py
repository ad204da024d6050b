"""Options of workflows: each field is a flag of a command, and the workflow takes the class."""
