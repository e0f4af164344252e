"""Jaxprs: a call's arguments as flat arrays, and the evaluation of a traced function, equation by equation."""
