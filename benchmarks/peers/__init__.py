"""The same models in other libraries. A package that is not installed is reported as missing."""
