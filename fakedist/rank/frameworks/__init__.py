"""The needs of frameworks beyond a faithful process group, one small file each.

An adapter is one function for one module of a framework. It changes only what the module must not conclude from "every
rank is like me". A module without the functions that its adapter looks for stays unchanged. The other files name the
attributes in which a framework keeps tensors, for the recorder. None of them imports its framework.
"""
