"""What tests of several rooms share: plain functions and values; fixtures are in conftest.py."""
