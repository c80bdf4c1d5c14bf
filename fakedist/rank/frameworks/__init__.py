"""The needs of frameworks beyond a faithful process group, one small file each.

An adapter is one function for one module of a framework. It changes what the module must not conclude from "every rank
is like me", and nothing else. If a module lacks the functions that its adapter looks for, it stays unchanged. The other
files name the attributes in which a framework keeps tensors, for the recorder. None of them imports its framework.
"""
