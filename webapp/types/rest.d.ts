// Answers of the REST interface by their name in JSDoc comments. `make lint` generates api.d.ts from docs/openapi.json.

import type { components } from "./api";

declare global {
  type Job = components["schemas"]["JobDetail"];
  type Estimate = components["schemas"]["Estimate"];
  type Layout = components["schemas"]["Layout"];
  type Cell = components["schemas"]["Cell"];
  type DryRunItem = components["schemas"]["DryRunItem"];
  type VerdictRow = components["schemas"]["VerdictRow"];
  type SearchResult = components["schemas"]["SearchResult"];
  type ProofItem = components["schemas"]["ProofItem"];
}
