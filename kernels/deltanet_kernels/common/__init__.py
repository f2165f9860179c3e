"""COMMON"""
