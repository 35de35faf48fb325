// A real OpenID provider for tests/hub/test_provider.py, at which one person logs in unasked.
// It reads its settings from standard input, and has one address of its own beside the protocol's:
// what is posted to /stand-in takes the place of the ID token in the next answer that has one.
import { text } from "node:stream/consumers";
import Provider from "oidc-provider";

const { issuer, port, account, key, algorithms, clients, secondsSlow } = JSON.parse(
  await text(process.stdin),
);
const trueTime = Date.now;
Date.now = () => trueTime() - 1000 * secondsSlow;

const aDay = 24 * 3600;
const provider = new Provider(issuer, {
  clients,
  jwks: { keys: [key] },
  enabledJWA: { idTokenSigningAlgValues: algorithms },
  cookies: { keys: ["signs the cookies of a test"] },
  pkce: { required: () => true },
  features: { devInteractions: { enabled: false } },
  interactions: { url: (_, { uid }) => `/person/${uid}` },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id }) }),
  // Nobody is asked to consent.
  async loadExistingGrant({ oidc }) {
    const grant = new provider.Grant({
      accountId: oidc.session.accountId,
      clientId: oidc.client.clientId,
    });
    grant.addOIDCScope("openid");
    await grant.save();
    return grant;
  },
  // Cookies last even where the clock is slow.
  ttl: { IdToken: 3600, Grant: aDay, Interaction: aDay, Session: aDay },
});

let standIn;
provider.use(async (asked, next) => {
  if (asked.path === "/stand-in") {
    standIn = await text(asked.req);
    asked.status = 204;
  } else if (asked.path.startsWith("/person/")) {
    const result = { login: { accountId: account } };
    asked.redirect(await provider.interactionResult(asked.req, asked.res, result));
  } else {
    await next();
    if (standIn && asked.body?.id_token) {
      asked.body.id_token = standIn;
      standIn = undefined;
    }
  }
});
provider.listen(port, "127.0.0.1", () => console.log("ready"));
