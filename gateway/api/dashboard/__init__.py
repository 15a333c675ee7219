"""The live page: one HTML document with its style and its script inside, made from the files beside this one."""
