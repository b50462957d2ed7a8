"""Transforms: changes to a built model, which the code of the model does not depend on."""
