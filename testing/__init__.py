"""What Penstock offers to tests of other packages."""
