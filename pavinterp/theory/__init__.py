"""Pure mathematics of the theory: no model, no files, nothing imported from the rest of the package."""
