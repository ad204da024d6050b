"""What this machine does with an encoder: checks that its vectors are right, then speeds.

Imports neither the run's folder nor the storage library: it works where those are not installed.
"""
