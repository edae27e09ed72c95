"""Who gets in, by certificate and by key, and what is told to nobody."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GRPC = "tests/security/test_grpc_tls.py"
HTTP = "tests/security/test_http_tls.py"
CERTS = "tests/security/test_certs.py"
CLIENT = "tests/security/test_client_tls.py"
EVERY_PATH = "tests/router/test_every_path_needs_a_key.py"
KEYS = "tests/router/test_api_keys.py"
UI = "tests/router/test_ui.py"
TLS = "workers/tls.py"

SECURITY = (
    Mutant(
        "a port of gRPC asks for a certificate",
        "-",
        TLS,
        "require_client_authentication=True",
        "require_client_authentication=False",
        (f"{GRPC}::test_who_shows_no_certificate_gets_nothing[False-without_certificate]",),
    ),
    Mutant(
        "the port of HTTP asks for a certificate",
        "-",
        "router/http/tls.py",
        "    context.verify_mode = ssl.CERT_REQUIRED\n",
        "",
        (
            f"{HTTP}::test_nobody_else_is[without a certificate]",
            f"{HTTP}::test_nobody_else_is[of another authority]",
        ),
    ),
    Mutant(
        "workers answer members of their own cluster only",
        "-",
        "workers/rpc.py",
        "if self._tls is not None and not for_clients:",
        "if False:",
        (
            f"{GRPC}::test_a_workers_port_is_for_members_and_a_routers_for_clients_too[a client]",
            f"{GRPC}::test_a_workers_port_is_for_members_and_a_routers_for_clients_too[a member of another cluster]",
        ),
    ),
    Mutant(
        "members call members of their own cluster only",
        "-",
        "workers/rpc.py",
        '(*options, ("grpc.ssl_target_name_override", self._tls.name))',
        "options",
        (f"{GRPC}::test_a_member_speaks_to_nobody_of_another_cluster",),
    ),
    Mutant(
        "a port of gRPC takes new certificates",
        "-",
        TLS,
        "            self.files.refresh()\n",
        "",
        (f"{GRPC}::test_new_certificates_are_taken_without_a_restart",),
    ),
    Mutant(
        "the port of HTTP takes new certificates",
        "-",
        "router/http/tls.py",
        "        connection.context = latest\n",
        "",
        (f"{HTTP}::test_new_files_are_taken_without_a_restart",),
    ),
    Mutant(
        "what runs by former certificates goes on",
        "-",
        "workers/tls_channel.py",
        "            self._former.append(self._channel)\n",
        "            asyncio.get_running_loop().create_task(self._channel.close())\n",
        (f"{GRPC}::test_new_certificates_are_taken_without_a_restart",),
    ),
    Mutant(
        "a client takes new certificates",
        "-",
        "cluster/client_tls.py",
        "self._folder is not None and self._folder.refresh()",
        "False",
        (
            f"{CLIENT}::test_a_client_goes_on_with_new_certificates",
            f"{CLIENT}::test_an_async_client_goes_on_with_new_certificates",
        ),
    ),
    Mutant(
        "half of new files is not taken",
        "-",
        TLS,
        "problem = fault_of(pems.ca, pems.certificate, pems.key)",
        'problem = ""',
        (
            f"{GRPC}::test_files_that_do_not_fit_together_are_not_taken",
            f"{CERTS}::test_files_that_do_not_do_are_refused_with_what_is_wrong[another's key]",
            f"{CERTS}::test_files_that_do_not_do_are_refused_with_what_is_wrong[another authority]",
            f"{CERTS}::test_a_certificate_that_ran_out_is_refused",
        ),
    ),
    Mutant(
        "a cluster has a certificate of its own",
        "-",
        TLS,
        "(self._name and members != [self._name])",
        "False",
        (f"{CERTS}::test_files_that_do_not_do_are_refused_with_what_is_wrong[another cluster's]",),
    ),
    Mutant(
        "certificates are looked at before anything starts",
        "-",
        "cluster/check.py",
        "        membership(config.security, config.name)\n",
        "        pass\n",
        (f"{CERTS}::test_config_check_and_up_refuse_them_before_anything_starts",),
    ),
    Mutant(
        "KV is as encrypted as all else",
        "-",
        "workers/security_config.py",
        "or transport not in NEVER_ENCRYPTED",
        "or True",
        (f"{CERTS}::test_what_cannot_be_encrypted_is_refused_beside_tls[gloo]",),
    ),
    Mutant(
        "a Ray that is joined is as encrypted as all else",
        "-",
        "cluster/check.py",
        "        require_of_joined_ray(security)\n",
        "        pass\n",
        (f"{CERTS}::test_a_ray_that_is_joined_must_speak_tls_too",),
    ),
    Mutant(
        "without a key only the probes are answered",
        "-",
        "router/http/edge.py",
        '_OPEN_PATHS = ("/health", "/ready")',
        '_OPEN_PATHS = ("/health", "/ready", "/metrics")',
        (f"{EVERY_PATH}::test_every_http_path_says_401_without_a_key",),
    ),
    Mutant(
        "every method of gRPC needs a key",
        "-",
        "router/grpc_keys.py",
        "            return _refusing(error)\n",
        "            if 'Unknown' not in handler_call_details.method:\n                return _refusing(error)\n",
        (f"{EVERY_PATH}::test_every_grpc_method_says_unauthenticated_without_a_key",),
    ),
    Mutant(
        "a database's password is not shown",
        "-",
        "cluster/cli_config.py",
        '_PASSWORD = re.compile(r":(?!//)[^@]*@")',
        '_PASSWORD = re.compile(r"(?<=://)([^:/@]*):[^@]*@")',
        ("tests/security/test_secrets.py::test_a_password_is_in_nothing_that_is_said_of_a_config",),
    ),
    Mutant(
        "a wrong key is refused over HTTP",
        "",
        "router/tenants.py",
        "if hmac.compare_digest(sha256, digest):",
        "if True:",
        (f"{KEYS}::test_without_a_key_or_with_a_wrong_one_only_probes_are_answered",),
    ),
    Mutant(
        "a wrong key is refused over gRPC",
        "",
        "router/server.py",
        "[KeyInterceptor(self._keys)] if self._keys else ()",
        "()",
        (f"{KEYS}::test_without_a_key_or_with_a_wrong_one_only_probes_are_answered",),
    ),
    Mutant(
        "tokens of an answer are charged",
        "",
        "router/text.py",
        "request.caller.spend(len(chunk.token_ids))",
        "pass",
        (f"{KEYS}::test_tokens_of_prompts_and_answers_count_and_what_is_used_up_is_refused",),
    ),
    Mutant(
        "a tenant sees its own requests alone",
        "",
        "router/activity.py",
        "if tenant is None or one.tenant == tenant]",
        "]",
        (
            f"{UI}::test_a_tenant_sees_its_own_requests_an_admin_all_and_to_look_costs_nothing",
            "tests/router/test_activity.py::test_a_tenant_is_told_of_its_own_alone",
        ),
    ),
    Mutant(
        "a browser's way to give a key is one to the page alone",
        "",
        "router/ui/access.py",
        'return path == "/ui" or path.startswith("/ui/")',
        "return True",
        (f"{UI}::test_a_browsers_way_to_give_a_key_is_no_way_to_anything_but_the_page",),
    ),
    Mutant(
        "what the page is told is bounded",
        "",
        "router/activity.py",
        "MAX_SHOWN - len(running)",
        "None",
        (
            f"{UI}::test_with_200_workers_and_1000_requests_it_is_small_and_quickly_made",
            "tests/router/test_activity.py::test_what_it_tells_is_bounded_and_what_runs_has_no_more_than_its_share",
        ),
    ),
)
